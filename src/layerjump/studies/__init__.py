"""Experiments: each module is one study, with its protocol, numbers and figures."""
