"""Steps over an emulated link, measured side by side."""
