"""The order of nodes in a graph: precedence and time as numbers, a list scheduler, memory."""
