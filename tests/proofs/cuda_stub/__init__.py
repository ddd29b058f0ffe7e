"""The real NIXL and UCX on a GPU node whose driver is a stand-in: `python -m tests.proofs.cuda_stub`."""
