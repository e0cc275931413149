"""Penstock runs disaggregated LLM serving: operator, router, planner, simulator. One package a part."""
