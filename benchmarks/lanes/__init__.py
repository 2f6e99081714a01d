"""The product on every torch it is declared for: one lane each, in an environment of its own."""
