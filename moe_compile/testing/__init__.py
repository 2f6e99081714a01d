"""Property-test strategies and equivalence checks, public for users' own layers."""
