"""The wire protocols of model servers, one file each, behind one small Protocol."""
