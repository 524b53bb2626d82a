"""The knobs that the templates have."""

from __future__ import annotations

KNOWN_KNOBS: dict[str, tuple[int | str, ...] | range] = {
    "strategy": (
        "column_slices",
        "mailbox",
        "separate",
        "last_cta",
        "semaphore",
        "bulk_reduce",
        "atomic",
    ),
    "order": ("turns", "free"),
    "levels": range(1, 3),
    "overlap": ("dependent", "none"),
    "arrival": ("late", "early"),
    "sum_threads": range(0, 1025, 32),
    "slice_columns": range(0, 1025, 4),
    "cluster": (1, 2, 4, 8, 16),
    "pipeline": ("bulk", "direct", "async"),
    "stages": range(1, 17),
    "threads_per_row": (8, 16, *range(32, 1025, 32)),
    "rows_per_cta": range(1, 33),
    "rows_in_flight": range(1, 17),
    "vector_bytes": (2, 4, 8, 16, 32),
    "reload": ("none", "smem"),
    "weight_in": ("registers", "smem"),
    "ctas_per_sm": range(1, 33),
    "spare_sms": range(1024),
    "grid": ("full", "even"),
    "min_blocks": range(33),
    "register_cap": range(256),
    "load_hint": ("default", "no_allocate", "streaming", "evict_last"),
    "store_hint": ("default", "streaming"),
}
"""The knobs that the templates know, with the values for which they make a kernel."""
