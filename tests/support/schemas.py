"""Ten varied JSON Schemas whose texts are short, so that even a careless model comes to an end of them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(properties: Schema, *, optional: tuple[str, ...] = ()) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Schema] = {
    "nested objects": _object(
        {
            "user": _object(
                {
                    "name": {"type": "string", "minLength": 1, "maxLength": 20},
                    "address": _object(
                        {
                            "city": {"type": "string", "maxLength": 20},
                            "zip": {"type": "integer", "minimum": 0, "maximum": 99999},
                        }
                    ),
                }
            )
        }
    ),
    "arrays with bounds": {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 6},
        "minItems": 3,
        "maxItems": 5,
    },
    "enum": _object({"colour": {"enum": ["red", "green", None, 7, True]}, "size": {"enum": ["S", "M", "L"]}}),
    "const": _object({"kind": {"const": "invoice"}, "version": {"const": 3}, "tags": {"const": ["a", "b"]}}),
    "pattern and format": _object(
        {
            "phone": {"type": "string", "pattern": "^\\+[0-9]{2}-[0-9]{6,8}$"},
            "date": {"type": "string", "format": "date"},
        }
    ),
    "number ranges": _object(
        {
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "score": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
            "dozen": {"type": "integer", "minimum": 12, "maximum": 144, "multipleOf": 12},
        }
    ),
    "anyOf": {
        "anyOf": [
            {"type": "string", "minLength": 2, "maxLength": 8},
            _object({"id": {"type": "integer", "minimum": 0, "maximum": 9}}),
            {"type": "boolean"},
        ]
    },
    "optional fields": _object(
        {
            "title": {"type": "string", "maxLength": 15},
            "draft": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
        },
        optional=("draft", "tags"),
    ),
    "$ref": {
        "$defs": {
            "leaf": _object({"value": {"type": "integer", "minimum": 0, "maximum": 99}}),
            "pair": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 2, "maxItems": 2},
        },
        **_object({"left": {"$ref": "#/$defs/pair"}, "right": {"$ref": "#/$defs/leaf"}}),
    },
    "unicode": _object(
        {
            "stadt": {"enum": ["Zürich", "Łódź", "São Paulo", "東京", "🌊"]},
            "größe": {"type": "integer", "minimum": 1, "maximum": 9},
        }
    ),
}
