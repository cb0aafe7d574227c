"""Pure drawing: data, width and height in; lines of (text, style) runs out."""
