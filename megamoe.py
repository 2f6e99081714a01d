"""`import megamoe`, the name of the distribution, has the public names of `moe_compile`."""

from moe_compile import explain, measured_waits, register_node_groups

__all__ = ["explain", "measured_waits", "register_node_groups"]
