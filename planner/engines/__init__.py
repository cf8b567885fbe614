"""Configurations of training engines, in and out: DeepSpeed's JSON, accelerate's YAML, transformers' TrainingArguments.

A file is read into an `Imported` (`detect.read_config`), which becomes options of a question (`imported.apply`); a `Request`
is written as files (`write.files_of`).  The engines themselves are not imported.
"""
