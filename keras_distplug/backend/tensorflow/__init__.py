"""The only code that touches private names of Keras and TensorFlow.

Each module says which versions need it and which upstream issue it works around;
`tests/backend/test_upstream.py` fails when upstream no longer needs it.
"""
