"""`kvxferd bench`: what a daemon costs against NIXL inside the engine, interleaved in one run."""
