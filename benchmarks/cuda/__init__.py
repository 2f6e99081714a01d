"""The CUDA code that Inductor generates for an H100, made and read on a machine without a GPU."""
