"""Commits: on disk, made, mirrored, and rewound to. Imports no torch."""
