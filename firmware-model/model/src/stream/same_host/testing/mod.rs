//! What tests and fuzz targets have for connections on one host.

pub(crate) mod fuzzing;
