"""Layer 5, the server: vLLM's OpenAI endpoint as a process, and a small client for it."""
