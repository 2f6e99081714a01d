"""In which order nodes run: precedence and time as numbers, a list scheduler, memory."""
