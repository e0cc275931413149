"""The Penstock router: receives requests by the OpenAI API and sends them to workers."""
