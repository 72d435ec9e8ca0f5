//! Helpers of tests and fuzz targets for connections on one host.

pub(crate) mod fuzzing;
