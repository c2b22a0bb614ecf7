//! Pictures.

use std::io;

use phalanx::{Error, Result};
use png::{BitDepth, ColorType, Encoder};

/// A picture of 8 bits a channel, row by row from the top.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    width: u32,
    height: u32,
    channels: u8,
    pixels: Vec<u8>,
}

impl Picture {
    /// Of grey pixels: `width * height` bytes.
    ///
    /// # Errors
    /// If there are more or fewer bytes, or none.
    pub fn gray(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self> {
        Self::new(width, height, 1, pixels)
    }

    /// Of grey pixels as numbers from 0 (black) to 1 (white); what is beyond counts as the nearer of these, NaN as black.
    ///
    /// # Errors
    /// If there are not `width * height` numbers, or none.
    pub fn gray_f32(width: u32, height: u32, pixels: &[f32]) -> Result<Self> {
        // A float that is converted stays within the bytes, and NaN becomes 0.
        Self::gray(width, height, pixels.iter().map(|pixel| (pixel * 255.0).round() as u8).collect())
    }

    /// Of pixels of three bytes, red, green and blue: `width * height * 3` bytes.
    ///
    /// # Errors
    /// If there are more or fewer bytes, or none.
    pub fn rgb(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self> {
        Self::new(width, height, 3, pixels)
    }

    /// Of pixels of four bytes, red, green, blue and opacity: `width * height * 4` bytes.
    ///
    /// # Errors
    /// If there are more or fewer bytes, or none.
    pub fn rgba(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self> {
        Self::new(width, height, 4, pixels)
    }

    fn new(width: u32, height: u32, channels: u8, pixels: Vec<u8>) -> Result<Self> {
        let expected = u64::from(width).saturating_mul(u64::from(height)).saturating_mul(channels.into());
        if expected == 0 || pixels.len() as u64 != expected {
            return Err(Error::invalid_argument(format!(
                "a picture of {width} x {height} pixels with {channels} channels has {expected} bytes, not {}",
                pixels.len()
            )));
        }
        Ok(Self { width, height, channels, pixels })
    }

    /// Pixels in a row.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Bytes of a pixel: 1 is grey, 3 red, green and blue, 4 these with opacity.
    pub fn channels(&self) -> u8 {
        self.channels
    }

    /// Its bytes, row by row from the top.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// As a PNG file. For sinks: it takes milliseconds.
    ///
    /// # Errors
    /// If the encoder refuses it.
    pub fn png(&self) -> io::Result<Vec<u8>> {
        let mut file = Vec::new();
        let mut encoder = Encoder::new(&mut file, self.width, self.height);
        encoder.set_depth(BitDepth::Eight);
        encoder.set_color(match self.channels {
            1 => ColorType::Grayscale,
            3 => ColorType::Rgb,
            _ => ColorType::Rgba,
        });
        let mut writer = encoder.write_header().map_err(io::Error::other)?;
        writer.write_image_data(&self.pixels).map_err(io::Error::other)?;
        writer.finish().map_err(io::Error::other)?;
        Ok(file)
    }
}

impl std::fmt::Debug for Picture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Picture({} x {} x {})", self.width, self.height, self.channels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_can_be_read() {
        let picture = Picture::rgb(3, 2, (0..18).collect()).unwrap();
        let file = picture.png().unwrap();
        let mut reader = png::Decoder::new(io::Cursor::new(file)).read_info().unwrap();
        let mut pixels = vec![0; 18];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height, &pixels[..]), (3, 2, picture.pixels()));
    }

    #[test]
    fn a_wrong_length_is_an_error_with_both() {
        let error = Picture::rgba(3, 2, vec![0; 18]).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains("24 bytes, not 18"), "{error}");
        assert!(Picture::gray(0, 2, Vec::new()).is_err());
        assert_eq!(Picture::gray_f32(2, 2, &[0.0, 1.0, 7.0, f32::NAN]).unwrap().pixels(), [0, 255, 255, 0]);
    }
}
