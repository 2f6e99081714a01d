"""What operators take and how long that is: amounts, rates, traced layers."""
