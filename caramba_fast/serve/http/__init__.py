"""An OpenAI-compatible HTTP server over `AsyncEngine`; needs the extra ``serve``."""
