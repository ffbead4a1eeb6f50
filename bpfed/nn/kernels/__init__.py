"""Operations that PyTorch has no fast form of when many clients are stacked."""
