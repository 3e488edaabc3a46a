"""Package of optional features (``extensions`` in a strategy file). FedSync ships none here; users add their own."""
