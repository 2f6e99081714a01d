"""What published figures say: fits of the constants that hardware profiles carry."""
