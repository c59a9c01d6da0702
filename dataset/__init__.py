"""From a stream to batches: sources, the pipe, parsing, loading. A library inside a trainer; never imports torch."""
