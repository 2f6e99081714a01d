"""What is kept for the backward pass by price, held against torch's own solver."""
