//! Folders of images.

mod decode;
mod jpeg;
mod tiff;

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use image::RgbImage;
use phalanx::{Error, Result};

use self::decode::{Cause, Options, decode};
use super::{bad, entries, files, io_error, open_file, without_panic};
use crate::Dataset;
use crate::dataset::item;
use crate::worker::{mix, mix_bytes};

/// torchvision's.
const EXTENSIONS: &[&str] = &["jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"];
/// Of an image's sides, in pixels.
const MAX_SIDE: u32 = 1 << 15;
/// What decoding an image may take.
const MAX_BYTES: u64 = 512 << 20;

/// An image and its class.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageSample {
    /// With three channels, whatever the file has.
    pub image: RgbImage,
    /// Its place in [`ImageFolder::classes`].
    pub class: usize,
}

/// Images in folders, one for each class; torchvision's `ImageFolder`. Classes are the folders under `root`, in the order of their
/// names. Items are the files in them and in folders under them, in the order of their names; names that begin with a dot are left out.
/// torchvision takes a folder's own files before those of the folders in it, and takes names that begin with a dot.
///
/// An image that is cut off, damaged or of an unknown kind is an error of its item, which names the file. What is read is what Pillow
/// reads, but:
///
/// * Colours of JPEG and lossy WebP differ by a few of 255 steps, because decoders round differently. Colours differ by one
///   step in CMYK TIFFs, BMPs with 16 bits a pixel, and PNMs whose maximum is not 255.
/// * 16 bits become 8 by rounding. Pillow cuts grey ones off at 255.
/// * Opacity is dropped, as Pillow's `convert("RGB")` drops it.
/// * An animation, and a file with several pages or images, is an error unless the [first](Self::first_frame) is asked for. What
///   follows the end of a JPEG, a PNG or a TIFF is ignored.
/// * A BMP or WebP that is longer or shorter than it says is an error.
/// * Floats, palettes in TIFF and formats other than JPEG, PNG, BMP, PNM, TIFF and WebP are errors.
/// * A JPEG of which scans are missing is an error. Pillow shows it blurred, or without its colours.
/// * A JPEG whose first component has fewer samples than another is an error, and so is one whose components are named R, G and B while a
///   marker says otherwise.
///
/// Colour profiles are not applied. A camera's orientation is, if [asked for](Self::apply_orientation).
///
/// ```no_run
/// use phalanx_data::{Dataset, folder::ImageFolder};
///
/// let photos = ImageFolder::open("photos")?; // photos/cat/1.jpg, photos/dog/7.png, ...
/// let sample = photos.get(17)?;
/// println!("a {} of {:?} pixels", photos.classes()[sample.class], sample.image.dimensions());
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct ImageFolder {
    classes: Vec<String>,
    files: Vec<(PathBuf, usize)>,
    options: Options,
}

impl ImageFolder {
    /// The folder at `root`. Files are listed, not opened.
    ///
    /// # Errors
    /// If there is no folder in `root`, a folder has no image, or a link leads nowhere.
    pub fn open(root: impl AsRef<Path>) -> Result<Self> {
        let root = root.as_ref();
        let (mut classes, mut found) = (Vec::new(), Vec::new());
        for (folder, _) in entries(root)?.into_iter().filter(|(_, is_folder)| *is_folder) {
            let class = classes.len();
            found.extend(files(&folder, EXTENSIONS)?.into_iter().map(|file| (file, class)));
            classes.push(folder.file_name().unwrap_or_default().to_string_lossy().into_owned());
        }
        if classes.is_empty() {
            return Err(Error::invalid_argument(format!("{} has no folder in it", root.display()))
                .with_remedy("make a folder for each class, with its images"));
        }
        Ok(Self { classes, files: found, options: Options::default() })
    }

    /// Whether images are turned as the camera noted it (EXIF). False by default, as in torchvision, whose loader shows such a photo as the
    /// sensor took it; Pillow's `ImageOps.exif_transpose` and OpenCV's `imread` turn it. The orientation of a TIFF is always applied, as
    /// Pillow does. A note in XMP alone, or behind the pixels of a PNG, is not read; Pillow reads it.
    #[doc(alias = "exif_transpose")]
    pub fn apply_orientation(mut self, apply: bool) -> Self {
        self.options.apply_orientation = apply;
        self
    }

    /// Whether the first image is read of an animation, and of a file with several pages. False by default: such a file is an error.
    pub fn first_frame(mut self, first: bool) -> Self {
        self.options.first_frame = first;
        self
    }

    /// The names of the classes.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Files with their classes, by item.
    pub fn files(&self) -> &[(PathBuf, usize)] {
        &self.files
    }
}

impl Dataset for ImageFolder {
    type Item = ImageSample;

    fn len(&self) -> usize {
        self.files.len()
    }

    fn get(&self, index: usize) -> Result<ImageSample> {
        let (path, class) = item(&self.files, index)?;
        let failed = |cause: Cause| bad(path, "its image", cause.text(), cause.remedy());
        let file = open_file(path)?;
        let length = file.metadata().map_err(|error| io_error(path, &error))?.len();
        if length > MAX_BYTES {
            return Err(failed(Cause::TooLarge(format!("the file has {length} bytes"))));
        }
        // It may grow while it is read: then it is longer than its first part, as one that is damaged.
        let mut bytes = Vec::with_capacity(length as usize);
        file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(|error| io_error(path, &error))?;
        let image = without_panic(path, "its image", || decode(&bytes, self.options).map_err(failed))?;
        Ok(ImageSample { image: image.into_rgb8(), class: *class })
    }

    fn fingerprint(&self) -> u64 {
        let classes = self.classes.iter().fold(0, |all, class| mix_bytes(all, class.as_bytes()));
        self.files.iter().fold(classes, |all, (path, class)| {
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            mix_bytes(mix(&[all, *class as u64]), name)
        })
    }
}

impl fmt::Debug for ImageFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageFolder({} images of {} classes)", self.files.len(), self.classes.len())
    }
}
