"""Pure: one service of a graph becomes process specs."""
