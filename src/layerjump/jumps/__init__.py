"""Linear maps between sites: second-moment sums, estimators, scores, files."""
