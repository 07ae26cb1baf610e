"""Generation with early exit and verified drafts."""
