"""A small scoring service: one client's model, loaded once, answers over HTTP (extra ``serve``)."""
