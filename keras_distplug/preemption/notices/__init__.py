"""What the cloud announces about the machine under us: read, never acted on. No TensorFlow here.

None of this was verified on a real machine of any cloud: the tests run against servers that answer
as the clouds' documents say.
"""
