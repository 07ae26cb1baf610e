"""Fixtures and models shared by the tests."""
