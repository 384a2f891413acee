"""Reports on converted models, for people and tools: dumps, explanations, comparisons and estimates."""
