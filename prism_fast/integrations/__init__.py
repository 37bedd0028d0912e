"""The losses inside other people's training code. Each module here needs the library it is named after, and only it."""
