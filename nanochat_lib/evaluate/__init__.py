"""Evaluation: bits per byte over text, the CORE method over few-shot bundles, chat tasks."""
