"""From a stream to batches: sources, pipe, formats, loader. A library inside a trainer; it never imports torch."""
