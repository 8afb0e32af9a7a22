"""Attacks on a running job: what strangers on its host try, and must not get (docs/security.md)."""
