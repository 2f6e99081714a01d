"""Where kernels for CPUs round by the place of a row in memory: for tests and the fuzzer."""
