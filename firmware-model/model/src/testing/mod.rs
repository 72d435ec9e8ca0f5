//! The environment of the model in tests and fuzz targets: hosts and drivers on one side, a network
//! and peers on the other. Not part of the product.

#[cfg(fuzzing)]
pub mod fuzzing;
#[cfg(any(test, fuzzing))]
pub(crate) mod mock;
#[cfg(any(test, fuzzing))]
pub(crate) mod rig;
pub mod sim;
