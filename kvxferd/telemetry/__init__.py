"""What a node shows of itself: metrics, logs and a short history. It decides nothing."""
