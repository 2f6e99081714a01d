"""Generated layer programs, run eagerly and compiled on two ranks and compared bit for bit."""
