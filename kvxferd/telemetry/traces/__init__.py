"""Spans of transfers, made from their records and sent to an OpenTelemetry collector."""
