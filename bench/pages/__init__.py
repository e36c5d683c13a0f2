"""What writes measured figures into docs/ and the README."""
