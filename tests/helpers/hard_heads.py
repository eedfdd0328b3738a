"""Heads as real models have them, where random ones never go.

Measured on Qwen2.5-1.5B: key biases of up to 456, in pairs that hardly rotate, where queries reach
48, so that all scores of a query lie near 12,700 or near minus as much; a first token whose hidden
state is seven times as large as any other. A level is what keys of a head have in common in one
number, and what its queries have there; tests scale scores by 0.1.
"""

LEVELS = {
    "far below": (40.0, -80.0),  # scores near -320
    "far above": (40.0, 80.0),
}
EXTREMES = {"lowest": (456.0, -280.0), "highest": (456.0, 280.0)}  # near 12,800
ALL = LEVELS | EXTREMES
FIRST = 8.0  # times a first row's numbers
