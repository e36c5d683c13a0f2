"""Writes measured figures into docs/ and the README."""
