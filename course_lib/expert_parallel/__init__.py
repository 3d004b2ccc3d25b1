"""Expert parallelism: the experts of a layer divided over ranks (notebook 16_experts)."""
