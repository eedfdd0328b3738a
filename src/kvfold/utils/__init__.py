"""What every layer uses: errors, files, text, versions of other libraries."""
