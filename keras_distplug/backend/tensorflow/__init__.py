"""The only code that uses private names of Keras and TensorFlow.

Every module names the versions that need it and the upstream issue it works around;
`tests/backend/test_upstream.py` fails once a workaround is obsolete.
"""
