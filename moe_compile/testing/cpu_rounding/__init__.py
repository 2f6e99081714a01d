"""Models of CPU kernels that round by the place of a row in memory, for tests and the fuzzer."""
