//! XDR (RFC 4506): big-endian units of four bytes.
//!
//! [`Xdr`] is both ways of a type; [`record!`] and [`words!`] make it for structs and enums. What
//! is variable in length is borrowed from the message that it stands in, so that no count of a
//! peer's makes us allocate.

/// Why bytes are no value of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadXdr {
    /// They end in the middle.
    #[error("the message is truncated")]
    Truncated,
    /// An enum's or union's word that means nothing.
    #[error("{0} is not among the values of its type")]
    Value(u32),
    /// More bytes than the type has room for.
    #[error("{0} bytes are too many")]
    Length(u32),
}

/// What is left of a message.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next `len` bytes, without their padding, which is skipped.
    ///
    /// # Errors
    /// They are not there.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], BadXdr> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(BadXdr::Truncated)?;
        self.0 = rest.get(padding(len)..).ok_or(BadXdr::Truncated)?;
        Ok(bytes)
    }
}

/// Bytes from `len` to the next multiple of four.
pub const fn padding(len: usize) -> usize {
    len.wrapping_neg() % 4
}

/// A type with an encoding.
pub trait Xdr<'a>: Sized {
    /// Takes a value off a message.
    ///
    /// # Errors
    /// There is none.
    fn take(reader: &mut Reader<'a>) -> Result<Self, BadXdr>;

    /// Appends the value.
    fn put(&self, out: &mut Vec<u8>);
}

impl Xdr<'_> for u32 {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        let (word, rest) = reader.0.split_first_chunk().ok_or(BadXdr::Truncated)?;
        reader.0 = rest;
        Ok(Self::from_be_bytes(*word))
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_be_bytes());
    }
}

impl Xdr<'_> for u64 {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        let (word, rest) = reader.0.split_first_chunk().ok_or(BadXdr::Truncated)?;
        reader.0 = rest;
        Ok(Self::from_be_bytes(*word))
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_be_bytes());
    }
}

/// Eight bytes as they are: verifiers.
impl Xdr<'_> for [u8; 8] {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        u64::take(reader).map(u64::to_be_bytes)
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
}

impl Xdr<'_> for bool {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        match u32::take(reader)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(BadXdr::Value(other)),
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        u32::from(*self).put(out);
    }
}

impl Xdr<'_> for () {
    fn take(_reader: &mut Reader) -> Result<Self, BadXdr> {
        Ok(())
    }

    fn put(&self, _out: &mut Vec<u8>) {}
}

/// A counted opaque or string.
impl<'a> Xdr<'a> for &'a [u8] {
    fn take(reader: &mut Reader<'a>) -> Result<Self, BadXdr> {
        let len = u32::take(reader)?;
        reader.bytes(len as usize)
    }

    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend_from_slice(self);
        out.resize(out.len() + padding(self.len()), 0);
    }
}

/// Optional-data.
impl<'a, T: Xdr<'a>> Xdr<'a> for Option<T> {
    fn take(reader: &mut Reader<'a>) -> Result<Self, BadXdr> {
        bool::take(reader)?.then(|| T::take(reader)).transpose()
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }
}

impl<'a, A: Xdr<'a>, B: Xdr<'a>> Xdr<'a> for (A, B) {
    fn take(reader: &mut Reader<'a>) -> Result<Self, BadXdr> {
        Ok((A::take(reader)?, B::take(reader)?))
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
}

/// Structs whose fields stand one behind the other.
macro_rules! record {
    ($($(#[$meta:meta])* pub struct $name:ident $(<$life:lifetime>)? {
        $($(#[$of_field:meta])* pub $field:ident: $type:ty,)+
    })+) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name $(<$life>)? { $($(#[$of_field])* pub $field: $type,)+ }
        crate::xdr::record!(@both $name [$($life)?] $($field: $type,)+);
    )+ };
    (@both $name:ident [] $($field:ident: $type:ty,)+) => {
        impl<'a> crate::xdr::Xdr<'a> for $name {
            crate::xdr::record!(@body 'a $($field: $type,)+);
        }
    };
    (@both $name:ident [$life:lifetime] $($field:ident: $type:ty,)+) => {
        impl<$life> crate::xdr::Xdr<$life> for $name<$life> {
            crate::xdr::record!(@body $life $($field: $type,)+);
        }
    };
    (@body $life:lifetime $($field:ident: $type:ty,)+) => {
        fn take(reader: &mut crate::xdr::Reader<$life>) -> Result<Self, crate::xdr::BadXdr> {
            Ok(Self { $($field: <$type as crate::xdr::Xdr>::take(reader)?,)+ })
        }

        fn put(&self, out: &mut Vec<u8>) {
            $(self.$field.put(out);)+
        }
    };
}

/// Enums that are a word.
macro_rules! words {
    ($($(#[$meta:meta])* pub enum $name:ident { $($(#[$of_value:meta])* $value:ident = $word:literal,)+ })+) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum $name { $($(#[$of_value])* $value = $word,)+ }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$value,)+];

            /// The value that this word encodes.
            pub const fn of(word: u32) -> Option<Self> {
                match word {
                    $($word => Some(Self::$value),)+
                    _ => None,
                }
            }
        }

        impl crate::xdr::Xdr<'_> for $name {
            fn take(reader: &mut crate::xdr::Reader) -> Result<Self, crate::xdr::BadXdr> {
                let word = u32::take(reader)?;
                Self::of(word).ok_or(crate::xdr::BadXdr::Value(word))
            }

            fn put(&self, out: &mut Vec<u8>) {
                (*self as u32).put(out);
            }
        }
    )+ };
}

pub(crate) use {record, words};
