"""Steps of whole jobs on a cluster, by formulas: `megamoe simulate`."""
