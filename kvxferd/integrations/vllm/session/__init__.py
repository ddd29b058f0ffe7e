"""What happens in each step: requests are published and pulled, and vLLM learns how that ended.

`scheduler` is the scheduler's side and `worker` a rank's; read these two first. `step_metadata` is what the
one sends to the other. `publishing` publishes requests, also while they are computed, `early_pulls` reads
those, `request_params` is the router's part of a request, `stats` counts, and `sleep` unmaps a worker's
memory before vLLM frees it.
"""
